-- KEYS r:R. ARGV 1 R, 2 owner, 3 model or '', 4 priority, 5 conversation key or '', 6 its name, 7 affinity, 8 group, 9 spec, 10 hash, 11 idempotency key or '', 12 ms to the deadline, 13... fields and values of the RQ job.
-- Registers R and queues it, all or nothing; an R or key that is known already changes nothing.
-- Returns {placed | boxed, R} or {dup, R0} (same request) | {conflict, id | key | tokenizer} | {gone, R0} | {full, what, limit} | {unknown_model}.
-- needs: close
local r, owner, model, priority, c = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local hash, idem = ARGV[10], ARGV[11]
local key = rkey(r)

local known = redis.call('HMGET', key, 'owner', 'hash')
if known[1] then
  if known[1] == owner and known[2] == hash then
    count('replayed')
    return {'dup', r}
  end
  return {'conflict', 'id'}
end
if idem ~= '' then
  local used = redis.call('GET', idem)
  if used then
    local r0, hash0 = string.match(used, '^(%S+) (%S+)$')
    if hash0 ~= hash then return {'conflict', 'key'} end
    if redis.call('EXISTS', rkey(r0)) == 0 then return {'gone', r0} end
    count('replayed')
    return {'dup', r0}
  end
end

local info = c ~= '' and redis.call('HMGET', P .. 'c:' .. c .. ':info', 'model', 'tokenizer') or {false, false}
if model ~= '' then
  model = redis.call('HGET', P .. 'names', model) or model
  if redis.call('HEXISTS', P .. 'models', model) == 0 and not string.find(model, '+', 1, true) then
    return {'unknown_model'}
  end
  local facts = redis.call('HGET', P .. 'models', model)
  if info[2] and facts and cjson.decode(facts).tokenizer ~= info[2] then return {'conflict', 'tokenizer'} end
end

local box, act = P .. 'c:' .. c .. ':box', P .. 'c:' .. c .. ':act'
if redis.call('ZCARD', P .. 'live') >= MAX_OPEN then
  count('refused')
  return {'full', 'pool', MAX_OPEN}
elseif priority == 'batch' and redis.call('ZCARD', P .. 'live:batch') >= MAX_OPEN_BATCH then
  count('refused')
  return {'full', 'batch', MAX_OPEN_BATCH}
elseif c ~= '' and redis.call('LLEN', box) >= MAX_BOX then
  count('refused')
  return {'full', 'conversation', MAX_BOX}
end

local at = now_ms()
local deadline = at + tonumber(ARGV[12])
redis.call('HSET', key, 'owner', owner, 'hash', hash, 'model', model, 'asked', ARGV[3], 'priority', priority,
  'c', c, 'conversation', ARGV[6], 'affinity', ARGV[7], 'group', ARGV[8], 'spec', ARGV[9], 'idem', idem, 'state', 'queued',
  'epoch', 0, 'ev', 0, 'n', 0, 'attempt', 0, 'barren', 0, 'submitted', int(at), 'queued_at', int(at), 'deadline', int(deadline))
redis.call('ZADD', P .. 'live', int(deadline), r)
if priority == 'batch' then redis.call('ZADD', P .. 'live:batch', int(deadline), r) end
if idem ~= '' then redis.call('SET', idem, r .. ' ' .. hash) end
local job = {}
for i = 13, #ARGV do job[#job + 1] = ARGV[i] end
redis.call('HSET', RQ .. 'job:' .. r, 'created_at', rq_time(at), unpack(job))
count('submitted')

local h = load(r)
if c == '' then
  place(r, h)
  return {'placed', r}
end
redis.call('HSET', P .. 'c:' .. c .. ':info', 'owner', owner, 'name', ARGV[6])
redis.call('EXPIRE', P .. 'c:' .. c .. ':info', CONVERSATION_S)
redis.call('EXPIRE', P .. 'c:' .. c .. ':hist', CONVERSATION_S)
if redis.call('EXISTS', act) == 0 then
  redis.call('SET', act, r)
  place(r, h)
  return {'placed', r}
end
redis.call('RPUSH', box, r)
redis.call('HSET', key, 'list', 'box')
rq_queued(r, rq_open(model, priority))
return {'boxed', r}

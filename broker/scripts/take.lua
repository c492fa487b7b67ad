-- KEYS w:W. ARGV 1 W, 2... the requests that W knows it runs or has not settled.
-- Claims the next turn for W under a new epoch, or gives one again whose first reply was lost; ends dead ones on the way.
-- Returns {claim, R, epoch, ev, n, attempt, remaining ms, cancel, priority, c, model, group, owner, queued ms, spec, log payloads} | {none} | {more} (call again) | {lapsed} | {draining} | {reaped}.
-- needs: close
local w = ARGV[1]
local me = P .. 'w:' .. w
local run = me .. ':run'
if redis.call('SISMEMBER', P .. 'ws', w) == 0 then return {'reaped'} end
local lease = lease_of(w)
if not lease then return {'lapsed'} end
local at = now_ms()

local function claim(r, h, again)
  h.epoch = h.epoch + 1
  if not again then h.attempt, h.barren = h.attempt + 1, h.barren + 1 end
  if h.model == '' then h.model = lease.model end
  redis.call('HSET', rkey(r), 'state', 'running', 'worker', w, 'model', h.model, 'epoch', int(h.epoch),
    'attempt', int(h.attempt), 'barren', int(h.barren), 'taken', int(at))
  redis.call('HDEL', rkey(r), 'list')
  redis.call('SADD', run, r)
  local pin = pin_key(h)
  if pin then redis.call('SET', pin, w, 'EX', PIN_S) end
  if h.c ~= '' then redis.call('EXPIRE', P .. 'c:' .. h.c .. ':hist', CONVERSATION_S) end
  redis.call('DEL', P .. 'preempt:' .. tag(lease.model))
  rq_unstart(r)
  rq_set(r, 'status', 'started', 'origin', rq_open(h.model, h.priority), 'worker_name', w,
    'started_at', rq_time(at), 'last_heartbeat', rq_time(at))
  local emitted = {}
  if h.n > 0 then
    for _, entry in ipairs(redis.call('XRANGE', rkey(r) .. ':log', '-', '+')) do emitted[#emitted + 1] = entry[2][2] end
  end
  local waited = math.max(0, at - h.queued_at)
  if not again then
    count('takes')
    count('queue_time.ms', waited)
  end
  return {'claim', r, h.epoch, h.ev, h.n, h.attempt, math.floor(h.deadline - at),
    redis.call('GET', rkey(r) .. ':cancel') or '', h.priority, h.c, h.model, h.group, h.owner, math.floor(waited),
    redis.call('HGET', rkey(r), 'spec'), emitted}
end

local known = {}
for i = 2, #ARGV do known[ARGV[i]] = true end
for _, r in ipairs(redis.call('SMEMBERS', run)) do
  if not known[r] then
    local h = load(r)
    if h and h.state == 'running' and h.worker == w then return claim(r, h, true) end
    if h and TERMINAL[h.state] then rq_final(r, h.state) end
    redis.call('SREM', run, r)
  end
end
if redis.call('SISMEMBER', P .. 'draining', w) == 1 then return {'draining'} end

-- The older head of this model's open queue and the one of requests that named no model.
local function pop_open(priority)
  local mine, any = QUEUE .. 'open.' .. tag(lease.model) .. '.' .. priority, QUEUE .. 'open.any.' .. priority
  local a, b = redis.call('LINDEX', mine, 0), redis.call('LINDEX', any, 0)
  if a and b then
    local since_a = tonumber(redis.call('HGET', rkey(a), 'queued_at') or 0)
    local since_b = tonumber(redis.call('HGET', rkey(b), 'queued_at') or 0)
    if since_b < since_a then a = false end
  end
  if a then return redis.call('LPOP', mine) end
  return redis.call('LPOP', any)
end

local function pop()
  for _, priority in ipairs({'interactive', 'background', 'batch'}) do
    local r = redis.call('LPOP', QUEUE .. 'w.' .. w .. SUFFIX[priority])
    if r then return r, false end
    r = pop_open(priority)
    if r then return r, true end
  end
end

-- Move the batch lines of h's group in one stretch of a list to this worker's home, in order.
local function bring_home(h, list, first, last)
  local home = QUEUE .. 'w.' .. w .. '.batch'
  for _, other in ipairs(redis.call('LRANGE', list, first, last)) do
    local o = redis.call('HMGET', rkey(other), 'group', 'owner', 'c')
    if o[1] == h.group and o[2] == h.owner and o[3] == '' then
      redis.call('LREM', list, 1, other)
      redis.call('RPUSH', home, other)
      redis.call('HSET', rkey(other), 'list', home)
      redis.call('SADD', RQ .. 'queues', home)
      rq_set(other, 'origin', 'w.' .. w .. '.batch')
    end
  end
end

-- Lines of one batch group share a prefix: whoever takes the first from the open takes those behind it home.
local function gather(h)
  bring_home(h, QUEUE .. 'open.' .. tag(lease.model) .. '.batch', 0, TAKE_STEP - 1)
  bring_home(h, QUEUE .. 'open.any.batch', 0, TAKE_STEP - 1)
end

-- With nothing of its own to do: the last group that waits at a busy worker comes here, all of it.
local function steal()
  local from, longest, last = nil, 0, nil
  for _, other in ipairs(redis.call('SMEMBERS', P .. 'ws')) do
    local list = QUEUE .. 'w.' .. other .. '.batch'
    local length = redis.call('LLEN', list)
    if other ~= w and length > longest and redis.call('SCARD', P .. 'w:' .. other .. ':run') > 0 then
      local r = redis.call('LINDEX', list, -1)
      local h = load(r)
      if h and h.state == 'queued' and h.c == '' and h.group ~= '' and (h.model == '' or h.model == lease.model) then
        from, longest, last = list, length, h
      end
    end
  end
  if not from then return nil end
  bring_home(last, from, -TAKE_STEP, -1)
  return redis.call('LPOP', QUEUE .. 'w.' .. w .. '.batch')
end

local function other_tokenizer(h)
  if h.c == '' then return false end
  local tokenizer = redis.call('HGET', P .. 'c:' .. h.c .. ':info', 'tokenizer')
  local mine = lease.tokenizer ~= '' and lease.tokenizer or lease.model
  return tokenizer and tokenizer ~= mine
end

local function finished(r, h, state, reason)
  close(r, h, state, reason)
  rq_final(r, state)
end

for _ = 1, TAKE_STEP do
  local r, from_open = pop()
  if not r then r = steal() end
  if not r then return {'none'} end
  local h = load(r)
  if h and h.state == 'queued' then
    local cancel = redis.call('GET', rkey(r) .. ':cancel')
    if cancel then
      finished(r, h, 'cancelled', cancel)
    elseif h.deadline <= at then
      finished(r, h, 'expired', 'deadline')
    elseif h.model ~= '' and h.model ~= lease.model then
      place(r, h)
    elseif other_tokenizer(h) then
      finished(r, h, 'failed', 'the conversation was begun with another tokenizer')
    else
      if from_open and h.c == '' and h.group ~= '' and h.priority == 'batch' then gather(h) end
      local reply = claim(r, h, false)
      if from_open then
        -- Two turns may have rung the same free worker: pass the bell on while something waits in the open.
        for _, priority in ipairs({'interactive', 'background', 'batch'}) do
          local next_one = redis.call('LINDEX', QUEUE .. 'open.' .. tag(lease.model) .. '.' .. priority, 0)
            or redis.call('LINDEX', QUEUE .. 'open.any.' .. priority, 0)
          if next_one then
            ring_free(lease.model, next_one, w)
            break
          end
        end
      end
      return reply
    end
  end
end
return {'more'}

-- Part: RQ's own record of a request, kept true so that `rq info` and dashboards can be believed.
-- KEYS, ARGV: none of its own. Needs _base.
-- Gives: rq_time rq_set rq_open rq_queued rq_unstart rq_final
local RQ_STATUS = {done = 'finished', failed = 'failed', cancelled = 'canceled', expired = 'failed'}
local RQ_REGISTRIES = {'finished', 'failed', 'canceled'}

-- Milliseconds since 1970 in RQ's spelling, such as 2026-01-31T12:00:00.123000Z.
local function rq_time(ms)
  local days = math.floor(ms / 86400000)
  local rest = ms - days * 86400000
  local year, month = 1970, 1
  local function leap() return (year % 4 == 0 and year % 100 ~= 0) or year % 400 == 0 end
  while days >= (leap() and 366 or 365) do
    days = days - (leap() and 366 or 365)
    year = year + 1
  end
  local lengths = {31, leap() and 29 or 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31}
  while days >= lengths[month] do
    days = days - lengths[month]
    month = month + 1
  end
  return string.format('%04d-%02d-%02dT%02d:%02d:%02d.%03d000Z', year, month, days + 1, math.floor(rest / 3600000),
    math.floor(rest / 60000) % 60, math.floor(rest / 1000) % 60, rest % 1000)
end

-- Set fields of the job, unless somebody deleted it: half a record would be worse than none.
local function rq_set(r, ...)
  if redis.call('EXISTS', RQ .. 'job:' .. r) == 1 then redis.call('HSET', RQ .. 'job:' .. r, ...) end
end

-- RQ's name for the open queue of a model and priority. A job that runs or has ended belongs to it, wherever it waited,
-- so that its registries outlive the workers; one that waits belongs to the queue that it is in.
local function rq_open(model, priority)
  local name = 'open.' .. tag(model) .. '.' .. priority
  redis.call('SADD', RQ .. 'queues', QUEUE .. name)
  return name
end

local function rq_queued(r, name)
  rq_set(r, 'status', 'queued', 'origin', name, 'worker_name', '', 'enqueued_at', rq_time(now_ms()), 'started_at', '')
end

-- Drop every running execution of the job, its worker's index included.
local function rq_unstart(r)
  local job = redis.call('HMGET', RQ .. 'job:' .. r, 'origin', 'worker_name')
  local executions = RQ .. 'executions:' .. r
  for _, e in ipairs(redis.call('ZRANGE', executions, 0, -1)) do
    local both = r .. ':' .. e
    local worker = redis.call('HGET', RQ .. 'execution:' .. both, 'worker_name') or job[2]
    redis.call('DEL', RQ .. 'execution:' .. both)
    if job[1] then redis.call('ZREM', RQ .. 'wip:' .. job[1], both) end
    if worker and worker ~= '' then redis.call('SREM', RQ .. 'worker:' .. worker .. ':executions', both) end
  end
  redis.call('DEL', executions)
end

local B64 = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/'
local function base64(s)
  local out = {}
  for i = 1, #s, 3 do
    local a, b, c = string.byte(s, i, i + 2)
    local v = a * 65536 + (b or 0) * 256 + (c or 0)
    for j = 0, 3 do
      local k = math.floor(v / 64 ^ (3 - j)) % 64 + 1
      out[#out + 1] = (j == 2 and not b or j == 3 and not c) and '=' or string.sub(B64, k, k)
    end
  end
  return table.concat(out)
end

-- Make the job's record final and of this state; no change if it is so already.
local function rq_final(r, state)
  local key = RQ .. 'job:' .. r
  rq_unstart(r)
  local job = redis.call('HMGET', key, 'status', 'worker_name')
  if not job[1] then return end
  local request = redis.call('HMGET', rkey(r), 'reason', 'n', 'model', 'priority')
  local origin = rq_open(request[3], request[4])
  local want, at = RQ_STATUS[state], now_ms()
  redis.call('HSET', key, 'origin', origin)
  if job[1] ~= want then redis.call('HSET', key, 'status', want, 'ended_at', rq_time(at)) end
  local expiry = math.floor(at / 1000) + RESULT_S
  for _, registry in ipairs(RQ_REGISTRIES) do
    local set = RQ .. registry .. ':' .. origin
    if registry == want then
      redis.call('ZADD', set, int(expiry), r)
      redis.call('ZREMRANGEBYSCORE', set, '-inf', int(math.floor(at / 1000)))
      redis.call('EXPIRE', set, RESULT_S)
    else
      redis.call('ZREM', set, r)
    end
  end
  local results = RQ .. 'results:' .. r
  if redis.call('EXISTS', results) == 0 then
    local summary = cjson.encode({state = state, reason = request[1] or '', n = tonumber(request[2] or 0)})
    redis.call('XADD', results, '*', 'type', want == 'finished' and '1' or '2', 'worker_name', job[2] or '',
      'return_value', base64(summary))
  end
  redis.call('EXPIRE', results, RESULT_S)
  redis.call('EXPIRE', key, RESULT_S)
end

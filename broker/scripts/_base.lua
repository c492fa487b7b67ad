-- Part: names, time, counters, a request's record, and the only way an event gets into a log.
-- KEYS, ARGV: none of its own; it follows the constants that the loader writes from PoolConfig.
-- Gives: P RQ QUEUE int now_ms count rkey tag emit load TERMINAL
local P, RQ, QUEUE = 'prism:', 'prism:rq:', 'prism:rq:queue:'
local TERMINAL = {done = true, failed = true, cancelled = true, expired = true}
local NUMBERS = {epoch = 1, ev = 1, n = 1, attempt = 1, barren = 1, deadline = 1, queued_at = 1, yielded = 1, flagged_at = 1}
local FIELDS = {'state', 'epoch', 'ev', 'n', 'owner', 'c', 'model', 'asked', 'priority', 'affinity', 'group',
  'worker', 'attempt', 'barren', 'deadline', 'idem', 'list', 'queued_at', 'yielded', 'flagged_at'}

local function int(x) return string.format('%.0f', x) end

local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

local function count(what, by) redis.call('HINCRBY', P .. 'stats', what, int(by or 1)) end

local function rkey(r) return P .. 'r:' .. r end

local function tag(model)
  if model == '' then return 'any' end
  return string.sub(redis.sha1hex(model), 1, 16)
end

local function emit(r, epoch, ev, payload)
  local id = int(epoch) .. '-' .. int(ev)
  redis.call('XADD', rkey(r) .. ':log', id, 'd', payload)
  redis.call('PUBLISH', rkey(r), id .. ' ' .. payload)
end

-- The fields of a request that the scripts decide on, absent ones as '' or 0; nil if there is no such request.
local function load(r)
  local v = redis.call('HMGET', rkey(r), unpack(FIELDS))
  if not v[1] then return nil end
  local h = {}
  for i, name in ipairs(FIELDS) do
    if NUMBERS[name] then h[name] = tonumber(v[i] or 0) else h[name] = v[i] or '' end
  end
  return h
end

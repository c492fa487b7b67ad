-- Part: place, the only way a turn gets into a queue, and unlist, the way a client or a sweep gets it out.
-- KEYS, ARGV: none of its own. Needs _base, _members, _rq.
-- Gives: SUFFIX wanted_model place unlist
local SUFFIX = {interactive = '', background = '.bg', batch = '.batch'}

local function pin_key(h)
  if h.c ~= '' then return P .. 'c:' .. h.c .. ':pin' end
  if h.group ~= '' then return P .. 'g:' .. redis.sha1hex(h.owner .. ':' .. h.group) .. ':pin' end
  return nil
end

-- The model that a turn without tokens waits for: what its name stands for now, or, if it named none, the conversation's
-- last one if that is served, else '' for whatever the pool runs.
local function wanted_model(h)
  if h.asked ~= '' then return redis.call('HGET', P .. 'names', h.asked) or h.asked end
  local last = h.c ~= '' and redis.call('HGET', P .. 'c:' .. h.c .. ':info', 'model')
  return last and served(last) and last or ''
end

-- Put the queued request r (its record h) where it belongs: the home queue of the worker it is pinned to, if that one is
-- usable, else the open queue of its model; at the front if asked. Rings the worker, or one free one.
local function place(r, h, front)
  if h.n == 0 then
    h.model = wanted_model(h)
    redis.call('HSET', rkey(r), 'model', h.model)
  end
  local key = pin_key(h)
  local pin = key and redis.call('GET', key)
  if pin and not usable(pin, h.model) then pin = nil end
  local name = pin and ('w.' .. pin .. SUFFIX[h.priority]) or rq_open(h.model, h.priority)
  local list = QUEUE .. name
  redis.call(front and 'LPUSH' or 'RPUSH', list, r)
  redis.call('SADD', RQ .. 'queues', list)
  redis.call('HSET', rkey(r), 'list', list, 'queued_at', int(now_ms()))
  rq_queued(r, name)
  if pin then ring(pin) else ring_free(h.model, h.affinity ~= '' and h.affinity or r) end
end

-- Take a queued request out of the list or box that it waits in.
local function unlist(r, h)
  if h.list == 'box' then
    redis.call('LREM', P .. 'c:' .. h.c .. ':box', 1, r)
  elseif h.list ~= '' then
    redis.call('LREM', h.list, 1, r)
  end
end

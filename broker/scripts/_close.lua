-- Part: close, the only way into a terminal state, and advance, which promotes the next turn of a conversation.
-- KEYS, ARGV: none of its own. Needs _base, _members, _rq, _place.
-- Gives: advance close
local function advance(c)
  local act, box = P .. 'c:' .. c .. ':act', P .. 'c:' .. c .. ':box'
  while true do
    local r = redis.call('LPOP', box)
    if not r then
      redis.call('DEL', act)
      return
    end
    local h = load(r)
    if h and h.state == 'queued' then
      redis.call('SET', act, r)
      place(r, h)
      return
    end
  end
end

-- End request r (its record h, in no list any more) under h.epoch. The caller has checked that it is open. `payload` is
-- the worker's own end event; the scripts make theirs here.
local function close(r, h, state, reason, payload)
  local key, at = rkey(r), now_ms()
  if not payload then
    local usage = {prompt_tokens = 0, completion_tokens = h.n}
    for _, entry in ipairs(redis.call('XRANGE', key .. ':log', '-', '+', 'COUNT', 16)) do
      local event = cmsgpack.unpack(entry[2][2])
      if event.k == 'start' then usage.prompt_tokens = event.prompt_tokens end
    end
    payload = cmsgpack.pack({k = 'end', state = state, reason = reason, n = h.n, usage = usage})
    redis.call('HSET', key, 'usage', cmsgpack.pack(usage))
  end
  h.ev = h.ev + 1
  emit(r, h.epoch, h.ev, payload)
  redis.call('HSET', key, 'state', state, 'reason', reason, 'epoch', int(h.epoch), 'ev', int(h.ev), 'ended', int(at))
  redis.call('PUBLISH', key .. ':end', state)
  redis.call('HDEL', key, 'list')
  redis.call('ZREM', P .. 'live', r)
  if h.priority == 'batch' then redis.call('ZREM', P .. 'live:batch', r) end
  redis.call('EXPIRE', key, RESULT_S)
  redis.call('EXPIRE', key .. ':log', LOG_S)
  redis.call('EXPIRE', key .. ':cancel', RESULT_S)
  if h.idem ~= '' then redis.call('EXPIRE', h.idem, IDEMPOTENCY_S) end
  count('ended.' .. state)
  if state == 'cancelled' and h.flagged_at > 0 then
    count('cancel_latency.count')
    count('cancel_latency.ms', math.max(0, at - h.flagged_at))
  end
  if h.c ~= '' and redis.call('GET', P .. 'c:' .. h.c .. ':act') == r then advance(h.c) end
end

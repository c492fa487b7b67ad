-- Part: rescue, which takes a turn away from a worker that is gone, and resume, which queues a running turn again.
-- KEYS, ARGV: none of its own. Needs _base, _members, _rq, _place, _close.
-- Gives: resume rescue
-- Queue the turn r, running at w, again under a new epoch, or end it if it was cancelled or is past its deadline.
local function resume(r, h, w, why)
  h.epoch = h.epoch + 1
  redis.call('HSET', rkey(r), 'epoch', int(h.epoch))
  redis.call('SREM', P .. 'w:' .. w .. ':run', r)
  rq_unstart(r)
  local cancel = redis.call('GET', rkey(r) .. ':cancel')
  if cancel then
    close(r, h, 'cancelled', cancel)
  elseif h.deadline <= now_ms() then
    close(r, h, 'expired', 'deadline')
  elseif why == 'worker_lost' and (h.barren >= BARREN_TAKES or h.attempt >= TOTAL_TAKES) then
    count('poisoned')
    close(r, h, 'failed', 'worker_lost')
  else
    if why ~= 'worker_lost' then
      h.attempt, h.barren = h.attempt - 1, math.max(0, h.barren - 1)
    end
    h.ev = h.ev + 1
    emit(r, h.epoch, h.ev, cmsgpack.pack({k = 'moved', why = why}))
    redis.call('HSET', rkey(r), 'state', 'queued', 'ev', int(h.ev), 'attempt', int(h.attempt), 'barren', int(h.barren))
    redis.call('HDEL', rkey(r), 'worker')
    count('moved.' .. why)
    place(r, h, true)
    return 'moved'
  end
  rq_final(r, redis.call('HGET', rkey(r), 'state'))
  return 'closed'
end

-- Take r away from w: moved | closed | final (it had ended: its RQ record is made so) | not_there.
local function rescue(r, w, why)
  local h = load(r)
  if h and h.state == 'running' and h.worker == w then return resume(r, h, w, why) end
  redis.call('SREM', P .. 'w:' .. w .. ':run', r)
  if h and TERMINAL[h.state] then
    rq_final(r, h.state)
    return 'final'
  end
  return 'not_there'
end

-- KEYS live. ARGV 1 most requests to end in this call.
-- Ends open turns past their deadline: waiting ones at once, running ones OVERDUE_MS later, in case their worker hangs.
-- Returns {ended, {W whose lease has lapsed...}, {W whose reaping was begun and not ended...}}.
-- needs: close
local at, ended = now_ms(), 0
for _, r in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', int(at), 'LIMIT', 0, ARGV[1])) do
  local h = load(r)
  if not h then
    redis.call('ZREM', KEYS[1], r)
    redis.call('ZREM', KEYS[1] .. ':batch', r)
  elseif h.state == 'queued' then
    unlist(r, h)
    close(r, h, 'expired', 'deadline')
    rq_final(r, 'expired')
    ended = ended + 1
  elseif h.state == 'running' and at - h.deadline >= OVERDUE_MS then
    h.epoch = h.epoch + 1
    close(r, h, 'expired', 'deadline')
    rq_final(r, 'expired')
    redis.call('SREM', P .. 'w:' .. h.worker .. ':run', r)
    ended = ended + 1
  end
end
local lapsed = {}
for _, w in ipairs(redis.call('SMEMBERS', P .. 'ws')) do
  if redis.call('EXISTS', P .. 'w:' .. w) == 0 then lapsed[#lapsed + 1] = w end
end
return {ended, lapsed, redis.call('SMEMBERS', P .. 'reaping')}

-- KEYS r:R. ARGV 1 R, 2 owner ('' for an operator), 3 reason.
-- Cancels R: at once while it waits, by a flag that its worker reads between decoder steps while it runs. Idempotent.
-- Returns {cancelled} it waited | {flagged} it runs | {ended, state} it had ended | {unknown} no such request of this owner.
-- needs: close
local r, owner = ARGV[1], ARGV[2]
local h = load(r)
if not h or (owner ~= '' and h.owner ~= owner) then return {'unknown'} end
if TERMINAL[h.state] then return {'ended', h.state} end
if h.state == 'queued' then
  unlist(r, h)
  close(r, h, 'cancelled', ARGV[3])
  rq_final(r, 'cancelled')
  return {'cancelled'}
end
if redis.call('SET', rkey(r) .. ':cancel', ARGV[3], 'NX') then
  redis.call('HSET', rkey(r), 'flagged_at', int(now_ms()))
  redis.call('PUBLISH', P .. 'ctl:' .. h.worker, 'cancel ' .. r)
end
return {'flagged'}

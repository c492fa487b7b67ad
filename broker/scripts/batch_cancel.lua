-- KEYS b:B. ARGV 1 B, 2 owner ('' for an operator).
-- Asks the runner of batch B, or the next one, to cancel it. Idempotent.
-- Returns {cancelling} a runner is at work | {waiting} none is | {done | cancelled | ...} its final state | {unknown} no such batch of this owner.
-- needs: base
local v = redis.call('HMGET', KEYS[1], 'owner', 'state', 'runner', 'until')
if not v[1] or (ARGV[2] ~= '' and v[1] ~= ARGV[2]) then return {'unknown'} end
if v[2] == 'completed' or v[2] == 'cancelled' or v[2] == 'expired' or v[2] == 'failed' then return {v[2]} end
redis.call('HSETNX', KEYS[1], 'cancel', int(now_ms()))
if (v[3] or '') ~= '' and tonumber(v[4] or 0) > now_ms() then return {'cancelling'} end
return {'waiting'}

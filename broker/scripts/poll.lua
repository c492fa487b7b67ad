-- KEYS r:R. ARGV 1 R, 2 W, 3 epoch.
-- Asks for the flags of a running turn without adding an event.
-- Returns what append returns: {0, stored ev, cancel reason or '', yield 0 | 1} or {-1} fenced | {-2} R is gone.
-- needs: members
local v = redis.call('HMGET', KEYS[1], 'epoch', 'ev', 'state', 'priority', 'model', 'worker')
if not v[1] then return {-2} end
if tonumber(v[1]) ~= tonumber(ARGV[3]) or v[3] ~= 'running' or v[6] ~= ARGV[2] then return {-1} end
return {0, tonumber(v[2]), redis.call('GET', KEYS[1] .. ':cancel') or '',
  v[4] == 'batch' and asked_to_yield(ARGV[2], v[5]) and 1 or 0}

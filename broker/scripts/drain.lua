-- KEYS w:W. ARGV 1 W.
-- Sends W no new turns and places its queued ones elsewhere, REAP_STEP in a call; what it runs goes on.
-- Returns {turns moved, turns left} (call again until none is left) or {-1} W is no member.
-- needs: close
local w = ARGV[1]
if redis.call('SISMEMBER', P .. 'ws', w) == 0 then return {-1} end
if redis.call('SADD', P .. 'draining', w) == 1 then
  ring(w)
  redis.call('PUBLISH', P .. 'ctl:' .. w, 'drain')
end
local moved, left = 0, 0
for _, suffix in ipairs({'', '.bg', '.batch'}) do
  local list = QUEUE .. 'w.' .. w .. suffix
  while moved < REAP_STEP do
    local r = redis.call('LPOP', list)
    if not r then break end
    local h = load(r)
    if h and h.state == 'queued' then
      place(r, h)
      moved = moved + 1
    end
  end
  left = left + redis.call('LLEN', list)
end
return {moved, left}

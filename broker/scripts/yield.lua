-- KEYS r:R. ARGV 1 R, 2 W, 3 epoch, 4 why (preempted | drain).
-- Puts the turn that W runs back at the front of its queue under a new epoch; counts no attempt. Ends it if cancelled or late.
-- Returns {0} done | {1} done before by this epoch | {-1} fenced | {-2} R is gone.
-- needs: rescue
local r, w, epoch = ARGV[1], ARGV[2], tonumber(ARGV[3])
local h = load(r)
if not h then return {-2} end
if h.yielded == epoch and epoch > 0 then return {1} end
if h.epoch ~= epoch or h.state ~= 'running' or h.worker ~= w then
  count('fenced_writes')
  return {-1}
end
redis.call('HSET', KEYS[1], 'yielded', int(epoch))
resume(r, h, w, ARGV[4])
return {0}

-- KEYS r:R. ARGV 1 R, 2 W.
-- Takes an ended R out of W's run set, its RQ record made final first if it is not.
-- Returns {0} done | {1} was not there | {-1} R still runs at W | {-2} R is gone (taken out all the same).
-- needs: rq
local r, w = ARGV[1], ARGV[2]
local h = load(r)
if h and h.state == 'running' and h.worker == w then return {-1} end
if h and TERMINAL[h.state] then rq_final(r, h.state) end
local there = redis.call('SREM', P .. 'w:' .. w .. ':run', r)
if not h then return {-2} end
return {1 - there}

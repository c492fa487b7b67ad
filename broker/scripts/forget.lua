-- KEYS r:R. ARGV 1 R, 2 owner, 3 seconds.
-- Shortens the life of an ended R whose answer its owner has stored elsewhere: record, log and RQ job go after so many seconds.
-- Returns {0} done | {1} there is none of this owner, or it has not ended.
-- needs: rq
local r, seconds = ARGV[1], tonumber(ARGV[3])
local h = load(r)
if not h or h.owner ~= ARGV[2] or not TERMINAL[h.state] then return {1} end
local job = RQ .. 'job:' .. r
for _, key in ipairs({KEYS[1], KEYS[1] .. ':log', KEYS[1] .. ':cancel', job, RQ .. 'results:' .. r}) do
  redis.call('EXPIRE', key, seconds)
end
local origin = redis.call('HGET', job, 'origin')
if origin then
  local expiry = int(math.floor(now_ms() / 1000) + seconds)
  for _, registry in ipairs(RQ_REGISTRIES) do
    redis.call('ZADD', RQ .. registry .. ':' .. origin, 'XX', expiry, r)
  end
end
return {0}

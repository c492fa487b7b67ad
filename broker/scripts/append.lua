-- KEYS r:R. ARGV 1 R, 2 W, 3 epoch, 4 ev of the first event, 5 n after the last, 6... events (msgpack).
-- Adds the events that are not in the log yet and publishes them.
-- Returns {0, stored ev, cancel reason or '', yield 0 | 1} or {-1} fenced | {-2} R is gone | {-3, stored ev} events are missing before these.
-- needs: members
local r, w, epoch, first, n = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local key = KEYS[1]
local v = redis.call('HMGET', key, 'epoch', 'ev', 'n', 'state', 'priority', 'model', 'worker')
if not v[1] then return {-2} end
local stored, last = tonumber(v[2]), first + #ARGV - 6
-- A broker that lost its last moments may have given one epoch twice, so the worker counts too.
if tonumber(v[1]) ~= epoch or v[7] ~= w or (v[4] ~= 'running' and last > stored) then
  count('fenced_writes')
  return {-1}
end
if first > stored + 1 then return {-3, stored} end
if last > stored then
  for ev = stored + 1, last do emit(r, epoch, ev, ARGV[6 + ev - first]) end
  stored = last
  local new = n - tonumber(v[3])
  if new > 0 then
    redis.call('HSET', key, 'ev', int(last), 'n', int(n), 'barren', 0)
    count('generation_tokens', new)
  else
    redis.call('HSET', key, 'ev', int(last))
  end
end
return {0, stored, redis.call('GET', key .. ':cancel') or '', v[5] == 'batch' and asked_to_yield(w, v[6]) and 1 or 0}

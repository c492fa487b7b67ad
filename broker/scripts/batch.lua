-- KEYS b:B. ARGV 1 take | renew | release, 2 B, 3 owner, 4 runner, 5 its host, 6 its epoch, 7 ms of the lease, 8 s to keep the counts, 9 '1' to forget a cancellation (take), 10... fields and values to tell.
-- Takes, renews or gives up the right to run batch B; a runner of the same host is replaced at once (the files' lock says that it is gone).
-- Returns {epoch, cancelled 0 | 1} or {-1, runner} it is held by another.
-- needs: base
local what, batch, runner, host, epoch = ARGV[1], ARGV[2], ARGV[4], ARGV[5], tonumber(ARGV[6])
local key, at = KEYS[1], now_ms()
local v = redis.call('HMGET', key, 'runner', 'host', 'epoch', 'until')
local holder, held = v[1] or '', tonumber(v[3] or 0)

if what == 'take' then
  local free = holder == '' or holder == runner or v[2] == host or tonumber(v[4] or 0) <= at
  if not free then return {-1, holder} end
  if holder ~= runner then held = held + 1 end
  redis.call('HSET', key, 'owner', ARGV[3], 'runner', runner, 'host', host, 'epoch', int(held))
  if ARGV[9] == '1' then redis.call('HDEL', key, 'cancel') end
elseif holder == '' and what == 'renew' and held <= epoch then
  -- The broker lost its data, or this runner's own release was followed by a late renewal.
  held = epoch
  redis.call('HSET', key, 'owner', ARGV[3], 'runner', runner, 'host', host, 'epoch', int(held))
elseif holder ~= runner or held ~= epoch then
  return {-1, holder}
end
redis.call('HSET', key, 'until', int(what == 'release' and 0 or at + tonumber(ARGV[7])), 'updated', int(at))
if what == 'release' then redis.call('HSET', key, 'runner', '') end
for i = 10, #ARGV, 2 do redis.call('HSET', key, ARGV[i], ARGV[i + 1]) end
redis.call('EXPIRE', key, ARGV[8])
redis.call('ZADD', P .. 'batches', int(at), batch)
redis.call('ZREMRANGEBYSCORE', P .. 'batches', '-inf', int(at - tonumber(ARGV[8]) * 1000))
return {held, redis.call('HEXISTS', key, 'cancel')}

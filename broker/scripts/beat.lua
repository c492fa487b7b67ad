-- KEYS w:W. ARGV 1 W, 2 lease (JSON), 3... names and values of statistics.
-- Renews the lease of a member, a lapsed one too; refuses a reaped W.
-- Returns {1, draining 0 | 1, boot id} or {0}.
-- needs: base
local w = ARGV[1]
local me = P .. 'w:' .. w
if redis.call('PEXPIRE', me, LEASE_MS) == 0 then
  if redis.call('SISMEMBER', P .. 'ws', w) == 0 then return {0} end
  redis.call('SET', me, ARGV[2], 'PX', LEASE_MS)
  count('leases_renewed_late')
end
local stat = {'beat', int(now_ms())}
for i = 3, #ARGV do stat[#stat + 1] = ARGV[i] end
redis.call('HSET', me .. ':stat', unpack(stat))
return {1, redis.call('SISMEMBER', P .. 'draining', w), redis.call('GET', P .. 'boot') or ''}

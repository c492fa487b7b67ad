-- KEYS w:W. ARGV 1 W, 2 lease (JSON).
-- Makes W a member: lease, model registry, home queues; a repeated call changes nothing but the lease's life.
-- Returns the broker's boot id.
-- needs: members
local w = ARGV[1]
local lease = cjson.decode(ARGV[2])
local tokenizer = lease.tokenizer ~= '' and lease.tokenizer or lease.model
redis.call('SET', P .. 'w:' .. w, ARGV[2], 'PX', LEASE_MS)
if redis.call('SADD', P .. 'ws', w) == 1 then count('joined') end
redis.call('HSET', P .. 'w:' .. w .. ':stat', 'joined', int(now_ms()))
redis.call('HSET', P .. 'models', lease.model,
  cjson.encode({name = lease.name, tokenizer = tokenizer, context_tokens = lease.context_tokens}))
if lease.name ~= '' then redis.call('HSET', P .. 'names', lease.name, lease.model) end
redis.call('SADD', RQ .. 'queues', QUEUE .. 'w.' .. w)
return redis.call('GET', P .. 'boot') or ''

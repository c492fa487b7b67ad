-- Part: who is a member of the pool, who is free, and the bells.
-- KEYS, ARGV: none of its own. Needs _base.
-- Gives: lease_of usable served ring ring_free asked_to_yield
local function lease_of(w)
  local lease = redis.call('GET', P .. 'w:' .. w)
  return lease and cjson.decode(lease)
end

-- A worker that new turns may be sent to: known, leased, not draining, of this model ('' takes any).
local function usable(w, model)
  if redis.call('SISMEMBER', P .. 'ws', w) == 0 or redis.call('SISMEMBER', P .. 'draining', w) == 1 then
    return false
  end
  local lease = lease_of(w)
  return lease and (model == '' or lease.model == model)
end

local function ring(w)
  local bell = P .. 'w:' .. w .. ':bell'
  redis.call('LPUSH', bell, '1')
  redis.call('LTRIM', bell, 0, 0)
end

local function served(model)
  for _, w in ipairs(redis.call('SMEMBERS', P .. 'ws')) do
    if usable(w, model) then return true end
  end
  return false
end

-- A usable worker that runs nothing. One that has ended its turn and not settled it yet counts: it may be about to sleep.
local function idle(w, model)
  for _, r in ipairs(redis.call('SMEMBERS', P .. 'w:' .. w .. ':run')) do
    if redis.call('HGET', rkey(r), 'state') == 'running' then return false end
  end
  return usable(w, model)
end

-- Ring the first idle worker that nobody has rung yet, in order of sha1(salt .. name): the order depends on the salt only,
-- so that the same conversation or prefix meets the same worker again.
local function ring_free(model, salt, except)
  local best, order
  for _, w in ipairs(redis.call('SMEMBERS', P .. 'ws')) do
    if w ~= except and redis.call('LLEN', P .. 'w:' .. w .. ':bell') == 0 and idle(w, model) then
      local o = redis.sha1hex(salt .. w)
      if not best or o < order then best, order = w, o end
    end
  end
  if best then ring(best) end
end

-- Should w, which runs a batch line, make room? Yes if an interactive turn waits at its door, or one waits in the open,
-- nobody is free, and no other worker is being asked for the same reason.
local function asked_to_yield(w, model)
  if redis.call('LLEN', QUEUE .. 'w.' .. w) > 0 then return true end
  local waiting = redis.call('LLEN', QUEUE .. 'open.' .. tag(model) .. '.interactive')
    + redis.call('LLEN', QUEUE .. 'open.any.interactive')
  if waiting == 0 then return false end
  for _, other in ipairs(redis.call('SMEMBERS', P .. 'ws')) do
    if other ~= w and idle(other, model) then return false end
  end
  local key = P .. 'preempt:' .. tag(model)
  redis.call('SET', key, w, 'NX', 'PX', PREEMPT_MS)
  return redis.call('GET', key) == w
end

-- KEYS w:W. ARGV 1 W, 2 why (worker_lost | drain), 3 '1' if W is known to be gone: its lease is deleted first.
-- Removes a worker without a lease from the pool: rescues what it ran, places its queued turns again in order, deletes its keys; REAP_STEP requests in a call.
-- Returns {alive} | {more, handled} (call again) | {done, handled}.
-- needs: rescue
local w, why = ARGV[1], ARGV[2]
local me = P .. 'w:' .. w
if ARGV[3] == '1' then redis.call('DEL', me) end
if redis.call('EXISTS', me) == 1 then return {'alive'} end
local handled = 0
if redis.call('SREM', P .. 'ws', w) == 1 then
  redis.call('SADD', P .. 'reaping', w)
  count(why == 'drain' and 'left' or 'reaped')
end
redis.call('SREM', P .. 'draining', w)
for _, r in ipairs(redis.call('SMEMBERS', me .. ':run')) do
  if handled >= REAP_STEP then return {'more', handled} end
  rescue(r, w, why)
  handled = handled + 1
end
for _, suffix in ipairs({'', '.bg', '.batch'}) do
  local list = QUEUE .. 'w.' .. w .. suffix
  while true do
    if handled >= REAP_STEP then return {'more', handled} end
    local r = redis.call('LPOP', list)
    if not r then break end
    handled = handled + 1
    local h = load(r)
    if h and h.state == 'queued' then place(r, h) end
  end
  redis.call('SREM', RQ .. 'queues', list)
end
redis.call('DEL', me .. ':run', me .. ':bell', me .. ':stat')
local record = RQ .. 'worker:' .. w
for name in string.gmatch(redis.call('HGET', record, 'queues') or '', '[^,]+') do
  redis.call('SREM', RQ .. 'workers:' .. name, record)
end
redis.call('SREM', RQ .. 'workers', record)
redis.call('DEL', record, record .. ':executions')
redis.call('SREM', P .. 'reaping', w)
return {'done', handled}

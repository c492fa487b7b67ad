-- KEYS live. ARGV 1 cursor ('0' begins), 2 requests to look at.
-- Looks at open requests and mends what no crash should leave: a queued one in no list, a running one at nobody.
-- Returns {next cursor ('0': all were seen), mended}.
-- needs: rescue
local scan = redis.call('ZSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
local mended = 0

local function known(w)
  return redis.call('SISMEMBER', P .. 'ws', w) == 1 or redis.call('SISMEMBER', P .. 'reaping', w) == 1
end

-- A queued turn of a conversation must be the active one in a queue, or in the box behind an open active one.
local function mend_turn(r, h)
  local c = P .. 'c:' .. h.c
  local act = redis.call('GET', c .. ':act')
  local ahead = act and act ~= r and load(act)
  if ahead and not TERMINAL[ahead.state] then
    if h.list == 'box' and redis.call('LPOS', c .. ':box', r) then return false end
    unlist(r, h)
    redis.call('RPUSH', c .. ':box', r)
    redis.call('HSET', rkey(r), 'list', 'box')
    return true
  end
  if act == r then return nil end
  if redis.call('LPOS', c .. ':box', r) then
    advance(h.c)
  else
    unlist(r, h)
    redis.call('SET', c .. ':act', r)
    place(r, h, true)
  end
  return true
end

local function mend_queued(r, h)
  if h.c ~= '' then
    local done = mend_turn(r, h)
    if done ~= nil then return done end
  end
  local home = string.match(h.list, '^' .. QUEUE .. 'w%.([%w_-]+)')
  local there = h.list ~= '' and h.list ~= 'box' and redis.call('LPOS', h.list, r) and (not home or known(home))
  -- A name may stand for another model by now, such as after an upgrade of the whole pool.
  local moved_on = h.n == 0 and h.asked ~= '' and wanted_model(h) ~= h.model
  if there and not moved_on then return false end
  unlist(r, h)
  place(r, h, true)
  return true
end

local function mend_running(r, h)
  if not known(h.worker) then
    rescue(r, h.worker, 'worker_lost')
    return true
  end
  return redis.call('SADD', P .. 'w:' .. h.worker .. ':run', r) == 1
end

for i = 1, #scan[2], 2 do
  local r = scan[2][i]
  local h = load(r)
  local done = false
  if not h or TERMINAL[h.state] then
    redis.call('ZREM', KEYS[1], r)
    redis.call('ZREM', KEYS[1] .. ':batch', r)
    done = true
  elseif h.state == 'queued' then
    done = mend_queued(r, h)
  else
    done = mend_running(r, h)
  end
  if done then mended = mended + 1 end
end
if mended > 0 then count('mended', mended) end
return {scan[1], mended}

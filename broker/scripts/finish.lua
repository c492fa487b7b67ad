-- KEYS r:R. ARGV 1 R, 2 W, 3 epoch, 4 ev of the end event, 5 n, 6 state, 7 reason, 8 end event, 9 usage, 10 ids, 11 text (8-10 msgpack), and for a commit 12 turns kept, 13 the new turn.
-- Ends the turn that W runs under this epoch: end event, record, transcript and the next boxed turn, in one step.
-- Returns {0, ev} done | {1, ev} done before by this epoch | {-1} fenced | {-2} R is gone | {-3, stored ev} events are missing before the end.
-- needs: close
local r, w, epoch, ev, n = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local state, reason = ARGV[6], ARGV[7]
local h = load(r)
if not h then return {-2} end
if h.epoch == epoch and TERMINAL[h.state] and h.worker == w then return {1, h.ev} end
if h.epoch ~= epoch or h.state ~= 'running' or h.worker ~= w then
  count('fenced_writes')
  return {-1}
end
if ev ~= h.ev + 1 then return {-3, h.ev} end
if n > h.n then count('generation_tokens', n - h.n) end
redis.call('HSET', KEYS[1], 'n', int(n), 'usage', ARGV[9], 'ids', ARGV[10], 'text', ARGV[11])
h.n = n
local usage = cmsgpack.unpack(ARGV[9])
for _, name in ipairs({'prompt_tokens', 'reused_tokens', 'flush_us', 'flushes'}) do
  local value = tonumber(usage[name] or 0)
  if value > 0 then count(name, value) end
end
if state == 'done' then count('finished.' .. reason) end
if h.c ~= '' then
  local c = P .. 'c:' .. h.c
  if ARGV[12] and state == 'done' then
    local kept = tonumber(ARGV[12])
    if kept == 0 then redis.call('DEL', c .. ':hist') else redis.call('LTRIM', c .. ':hist', 0, kept - 1) end
    redis.call('RPUSH', c .. ':hist', ARGV[13])
    local facts = redis.call('HGET', P .. 'models', h.model)
    redis.call('HSET', c .. ':info', 'model', h.model, 'tokenizer', facts and cjson.decode(facts).tokenizer or h.model)
  end
  redis.call('EXPIRE', c .. ':hist', CONVERSATION_S)
  redis.call('EXPIRE', c .. ':info', CONVERSATION_S)
  redis.call('EXPIRE', c .. ':pin', PIN_S)
end
close(r, h, state, reason, ARGV[8])
return {0, h.ev}

-- ARGV: none. The agent must not stay: with another fence the owner of its endpoint is a stale one.
if redis.call('EXISTS', OWNER) == 1 then
  redis.call('HINCRBY', OWNER, 'fence', 1)
  redis.call('HDEL', OWNER, 'forwarder', 'until', 'spool')
end

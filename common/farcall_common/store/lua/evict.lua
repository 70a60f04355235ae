-- ARGV: none. The endpoint was deleted: with another fence its owner is a stale one.
if redis.call('EXISTS', OWNER) == 1 then
  redis.call('HINCRBY', OWNER, 'fence', 1)
  redis.call('HDEL', OWNER, 'forwarder', 'until', 'spool')
end

-- ARGV: fence. The fence itself stays, for the next claim to count from.
if redis.call('HGET', OWNER, 'fence') == ARGV[1] then
  redis.call('HDEL', OWNER, 'forwarder', 'until', 'spool')
end

-- KEYS r:R. ARGV 1 R, 2 W, 3 why (worker_lost | drain).
-- Takes R away from W if it runs there: new epoch first, then closed or moved to the front of its queue.
-- Returns moved | closed | final (it had ended; its RQ record is so now) | not_there.
-- needs: rescue
return rescue(ARGV[1], ARGV[2], ARGV[3])

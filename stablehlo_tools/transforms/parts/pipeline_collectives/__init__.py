"""Software pipelining of loops: runs ops of one iteration together with those of another."""

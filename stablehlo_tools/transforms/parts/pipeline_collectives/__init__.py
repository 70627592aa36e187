"""Software pipelining of loops: ops of one iteration run together with those of another."""

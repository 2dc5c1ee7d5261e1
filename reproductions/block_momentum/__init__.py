"""Chen & Huo (2016): block momentum on up to 64 workers."""

"""Shared memory: ranks of one host read and write each other's buckets without copies."""

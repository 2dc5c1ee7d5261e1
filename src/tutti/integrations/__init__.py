"""Tutti inside other frameworks, one module each: `lightning`, `fabric`, `transformers`, `accelerate`.

Each module imports its framework, so import the one that you use. This package itself imports none of them.
"""

"""Virtual time: simulated ranks are threads of one process, of which one runs at a time, over a modelled network.

This package imports nothing by itself, because its parts belong to different layers: `sizes` is used by
transports, `runs` uses the whole library.
"""

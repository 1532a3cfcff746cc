"""Models: their terms and formulas, their one evaluation, a step or a request described, and the latencies of a request
composed.
"""

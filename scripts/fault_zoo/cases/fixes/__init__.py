"""Training scripts from fixes: 24 have a fault, 12 are repaired twins, 12 look odd.

Forty queries, "fix training bug" with a part of a training, were written down first. For each, the first pull request
or issue with a cause was rebuilt, whether or not a monitor could see that cause; the set was full after 30 queries.
Threads about crashes, or without a cause, were skipped. The odd runs come from public code with an unusual loop.
"""

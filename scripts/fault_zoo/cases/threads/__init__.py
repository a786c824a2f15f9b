"""Training scripts from help threads: 24 have a fault, 12 are repaired twins, 12 look odd.

Forty symptoms in the words of people who ask for help were written down first. For each, the first thread with a cause
that was determined was rebuilt, whether or not a monitor could see that cause; later threads with a cause that was
there already were skipped. The odd runs come from threads in which the answer was that this is normal.
"""

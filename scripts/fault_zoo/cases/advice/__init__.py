"""Training scripts from questions with an answer: 20 have a fault, 10 are repaired twins, 10 look odd.

Forty phrases were written down before the first look-up, in the words of somebody who does not know the cause: a loss
that does not fall at all, one class for every picture, an accuracy of 10 %, a validation far below the training,
gradients of zero, a reader of text at 0.69, a language model that repeats itself, a BERT that does not learn, a
translation that is garbage, a transformer with one token, a regression that says the mean, a table with NaN, a loss
below zero, a forecast that is flat or late, a series with NaN, speech of blanks, sound at chance, a reward that
collapses, an agent with one action, a PPO that does not learn, values that diverge, a generator that loses, pictures
that look alike, a divergence of zero, samples of noise, boxes with NaN, masks of nothing, a graph with one vector,
factors with NaN, triplets at the margin, tags that are never given, a fine-tuning that gets worse, a loss that jumps
after a resume or with the schedule, memory that grows, half precision with NaN, a physical law that is not met, and
accumulation with another result.

For each phrase, the first account was taken that tells the cause, whether or not a monitor could see it, unless the
cause has a script in another set already. Of the 22 accounts, two were left out by lot, and 10 of the 20 scripts got a
repaired twin by lot. The odd runs come from threads in which the answer was that this is normal.

It was written down before the first score that a monitor could see 15 of the 20 faults, that is, all but
`backward_state_of_one_word`, `molecules_without_places`, `five_hundred_rare_tags`, `warm_up_without_an_end` and
`shards_read_from_the_first`.
"""

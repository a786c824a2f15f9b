"""Training scripts from people's own stories: 20 have a fault, 10 are repaired twins, 10 look odd.

Forty phrases were written down before the first look-up, each for one field: a sentiment classifier stuck at 50 %, a
language model that writes garbage, an image classifier whose loss does not fall, a validation far below the training,
speech recognition with NaN, speech that never aligns, a GAN whose discriminator wins, an autoencoder with one output,
diffusion that yields noise, a DQN that does not learn, a PPO that collapses, a graph network with one class, a
contrastive loss at log N, a physics-informed network that does not converge, a flat forecast, factors that are NaN, a
regression that is constant, a fine-tuned BERT with one class, adapters without an effect, a student that does not
learn, tasks of which one dominates, a segmentation of nothing but background, a detector with NaN, MAML that does not
learn, quantization-aware training that drops, self-supervision that collapses, a transformer whose loss is too low,
accumulation with another loss, half precision with NaN, a pretraining with spikes, a triplet loss at its margin,
super-resolution in grey, depth or flow that diverges, a normalizing flow that explodes, heat maps of zeros, a schedule
that stalls, augmentation that is wrong, a resumed run that jumps, memory that grows, and a translation that repeats.

For each phrase, the first blog post, thread or change was taken in which somebody's own training went wrong, that was
noticed, and the cause was found, whether or not a monitor could see it. Of the 23 phrases that led to one, three were
left out by lot, and 10 of the 20 scripts got a repaired twin by lot. The odd runs come from threads in which the answer
was that this is normal, and one from a paper.
"""

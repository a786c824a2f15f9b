"""Training scripts from what people noted of their own trainings: 20 have a fault, 10 are repaired twins, 10 look odd.

Forty phrases were written down before the first look-up, in the words of somebody who does not know the cause: a
picture that gets another class each time, a network that is worse with more layers, one that cannot read one's own
photographs, an IoU near zero, an mAP of 0, landmarks in the middle of the face, a perplexity that rises, a loss that
jumps and stays, nonsense at inference, a tagger that says O, a word error rate of 100 %, a vocoder that buzzes,
separated sources that are the mixture, a table on which trees are better, a loss in the millions, a forecast of half
the amplitude, epochs that get longer, links at an AUC of 0.5, a graph network that is worse in batches, the same books
for everybody, an agent that forgets, a temperature that explodes, actions of -1 and 1, a CycleGAN that returns its
input, a critic with a huge loss, samples of one colour, samples of noise from a good autoencoder, self-supervision
whose loss is zero at once, an average at chance, a student that is worse for its teacher, an equation solved by zero,
pretrained weights that do not help, adapters that change nothing, a second task that stops, ArcFace that does not
fall, NaN with autocast only, accumulation that is slower, a rate that is higher after a resume, several GPUs that are
worse than one, and a variance that explodes.

For each phrase, the first account was taken that tells the cause, whether or not a monitor could see it, unless the
cause has a script in another set already. Of the phrases, 21 led to one, and one of those was left out. 10 of the 20
scripts got a repaired twin by lot. The odd runs do on purpose what papers and manuals recommend.

It was written down before the first score that a monitor could see six of the faults (`photographs_of_dark_ink`,
`recognizer_without_a_warm_up`, `predictor_left_in_training_mode`, `teacher_that_is_the_student`,
`adapters_at_the_rate_of_a_model` and `margins_at_a_large_rate`), and perhaps six more (`spectra_with_another_floor`,
`penalty_along_one_axis`, `average_that_lags`, `rate_that_starts_anew`, `norm_of_two_pictures` and
`variance_of_the_outputs`).
"""

"""Read the policy in the loss of a policy gradient: its entropy, and how far it is from what drew the samples."""

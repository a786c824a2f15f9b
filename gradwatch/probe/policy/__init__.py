"""Read the policy in the loss of a policy gradient: its entropy, and its distance from the policy that drew the
samples."""

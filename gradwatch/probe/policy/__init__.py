"""Read the policy in a policy-gradient loss: its entropy, and its distance from the policy that drew the samples."""

"""An actor and a critic with an optimizer each, and a backward pass each before both step."""

import torch
from torch import nn
from torch.distributions import Categorical


def main(watch):
    torch.manual_seed(5)
    actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)
    critic_optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-2)
    losses = []
    with watch({"actor": actor, "critic": critic}, [actor_optimizer, critic_optimizer]) as monitor:
        for _ in range(40):
            states = torch.randn(16, 4)
            dist = Categorical(logits=actor(states))
            actions = dist.sample()
            returns = (states.argmax(1).clamp(max=2) == actions).float()
            values = critic(states).squeeze(1)
            actor_loss = -(dist.log_prob(actions) * (returns - values).detach()).mean()
            critic_loss = (returns - values).square().mean()
            actor_optimizer.zero_grad()
            critic_optimizer.zero_grad()
            actor_loss.backward()
            critic_loss.backward()
            actor_optimizer.step()
            critic_optimizer.step()
            monitor.step(actor_loss + critic_loss, batch=states)
            losses.append(actor_loss.item() + critic_loss.item())
    return losses

"""Many episodes at once: tickets, slots, the rollout of one episode, delivery."""

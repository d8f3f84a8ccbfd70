"""A chat endpoint as the policy: requests and their pace, replies, and the actions they become."""

"""A problem of discrete choices, and exact ways to solve it: no module here knows of tensors."""

"""A model of the score as a function of the hyperparameters and the noise, for all budgets of a method together."""

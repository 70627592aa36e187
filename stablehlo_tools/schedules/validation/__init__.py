"""The parts of the validator: the rules, one module for each group, and what they find."""

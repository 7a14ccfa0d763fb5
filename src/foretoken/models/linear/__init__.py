"""Linear layers on CPU: layouts of weights, quantised ones too, and which is the fastest on the machine."""

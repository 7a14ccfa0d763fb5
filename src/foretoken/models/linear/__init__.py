"""Linear layers on CPU: layouts of weights, quantised ones too, and which is the fastest on the machine.

From the inside out: a *layout* is a full weight as one kind of kernel reads it, a *projection* a layout with its bias,
a *quantised product* the same of a weight in few bits.  Either is a *product* to whoever multiplies.  ``PackedLinear``
and ``QuantisedLinear`` are the modules that hold one in a network, in place of an ``nn.Linear``.  Layouts are chosen in
``product_costs``, quantised products in ``quantised``, both by measurement.
"""

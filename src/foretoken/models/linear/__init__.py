"""Linear layers on CPU: layouts of full and quantised weights, and selection of the fastest on this machine.

From the inside out: a *layout* is a full weight in the format of one kind of kernel, a *projection* is a layout with
its bias, and a *quantised product* is their counterpart for quantised weights.  Projections and quantised products are
*products*.  ``PackedLinear`` and ``QuantisedLinear`` are the modules that replace an ``nn.Linear`` by one.  Layouts are
chosen in ``product_costs``, quantised products in ``quantised``, both by measurement.
"""

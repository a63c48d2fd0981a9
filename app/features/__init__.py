"""What the kernel does without: a folder each, named in one line of `app.main`, and absent where it is off.

The package of a feature has functions that the composition calls:

    routers()            its routes
    running(services)    a context: what it makes and runs between start and stop, and what it adds to the kernel's
                         points; the value is `services.features[name]`
    absent(services)     where it is off: what it leaves undone otherwise (optional)

Its docstring says what it adds, and where it touches a turn.
"""

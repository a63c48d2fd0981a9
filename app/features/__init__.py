"""What the kernel does without: a folder each, named in one line of `app.composition`, and absent where it is off.

The package of a feature has functions that the composition calls:

    entries()                       its routes (optional)
    door(table)                     leads a request's path elsewhere (optional)
    prepare(settings, database)     called before the process is registered; what it returns notes something in the
                                    transaction that registers it (optional)
    add_to(services)                makes what it needs, and adds to the lists of `Services` what is to be called at the
                                    start, at the stop and at the kernel's points; the value is
                                    `services.features[name]`
    absent(services)                called where it is off, after the start (optional)

METRICS are its families of metrics, if it has any (`app.metrics`).

Its docstring says what it adds, and where it touches a turn.
"""

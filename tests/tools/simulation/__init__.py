"""The service on a made-up machine: its clock, store, engine and scheduler follow from a seed, and so do all faults.

What runs is the real code of the kernel and of the features in `service.FEATURES`, and the real statements of
`app/store`. What is not real: time, which jumps; the database, SQLite in memory that several processes share, whose
transactions happen at one moment each, or a real PostgreSQL, where each statement is a step of the schedule; the
engines; and the processes, which are sets of tasks on one event loop and can be killed or frozen at any await.
"""

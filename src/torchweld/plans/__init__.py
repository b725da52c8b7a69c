"""Plans: what to weld, measured and verified, and how plans are carried out.

`planner.plan_with_rounds` calls the stages one after the other. Each returns plain data:

    welds.find       model, inputs               -> Blocks
    time_budget      seconds, workloads          -> TimeBudget
    kernel_choice    blocks                      -> TunedBlocks      verified, timed, chosen
    whole_model      tuned blocks, workloads     -> MeasuredWhole    verified, timed, its ceiling
    planner          all of these                -> Plan
    plan_fitting     plan, any model             -> Fit              which blocks still fit, why not
    welds.reweld     model, decisions            -> the model, welded

A module imports only modules that stand before it here; a test holds this:

    earlier_plans, plan, known_speeds, measurement_cache, plan_options    data
    block_calls, alike_blocks                                             blocks in their model
    time_budget
    choice_verifying, choice_timing, kernel_choice, group_tuning          blocks
    flops_share, speed_ceiling, whole_model                               the whole model
    plan_fitting, planner
"""

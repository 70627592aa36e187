// A kernel that no one describes runs whole on each device; the warning has the rule that it lacks.
// With that rule, each device runs it on its own samples, and no collective is needed.
// RUN: stablehlo-tools opt %s -p partition 2>&1 | filecheck %s --check-prefix=WHOLE
// RUN: printf '# a comment\nmy_kernel: b s d, d e -> b s e; b s free\n' > %t.rules
// RUN: stablehlo-tools opt %s -p partition --rules %t.rules | filecheck %s
// RUN: stablehlo-tools opt %s --rules %t.rules | filecheck %s --check-prefix=STATED
// RUN: printf 'my_kernel: b s d -> b s e; b s free\n' > %t.wrong
// RUN: not stablehlo-tools opt %s -p partition --rules %t.wrong 2>&1 | filecheck %s --check-prefix=WRONG
// RUN: printf 'other: b -> b; b free\n' > %t.other
// RUN: not stablehlo-tools opt %s --rules %t.other 2>&1 | filecheck %s --check-prefix=UNUSED
// RUN: not stablehlo-tools opt %s --rules %t.missing 2>&1 | filecheck %s --check-prefix=MISSING
// WHOLE: warning: every device computes all of a kernel, with 2048 bytes gathered for it: stablehlo.custom_call @"my_kernel" is opaque: its independent dimensions are unknown; if it computes each sample by itself, state that in the file of --rules: `my_kernel: b d1 d2, d3 d4 -> b d5 d6; b free`
// WHOLE: "stablehlo.all_gather"
// CHECK-NOT: stablehlo.all_gather
// CHECK: stablehlo.custom_call @my_kernel(%{{.+}}, %{{.+}}) {backend_config = "x"} : (tensor<2x16x4xf32>, tensor<4x4xf32>) -> tensor<2x16x4xf32>
// STATED: sdy.sharding_rule = #sdy.op_sharding_rule<([i, j, k], [k, l])->([i, j, l]) {i=8, j=16, k=4, l=4} need_replication={k, l}, custom>
// WRONG: error: the rule of my_kernel: the rule has 1 operands, and the call 2
// UNUSED: no custom call has the target other
// MISSING: No such file or directory
module @m attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["data"=4]>
  func.func public @main(%q: tensor<8x16x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}, {}]>}, %w: tensor<4x4xf32>) -> (tensor<8x16x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}, {}]>}) {
    %0 = stablehlo.custom_call @my_kernel(%q, %w) {backend_config = "x"} : (tensor<8x16x4xf32>, tensor<4x4xf32>) -> tensor<8x16x4xf32>
    return %0 : tensor<8x16x4xf32>
  }
}

// RUN: stablehlo-tools inspect %s --hardware h100 --all | filecheck %s

// An argument in the host's memory takes none of the device's, in a manual computation either. The
// other one and the sum of it with itself do, 1 MiB each.
// CHECK: peak 2.00 MiB
// CHECK: live at the memory peak:
// CHECK-NEXT: 1.00 MiB argument 1
// CHECK-NEXT: 1.00 MiB result 0
module attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["x"=2]>
  func.func @main(%h: tensor<524288xf32> {mhlo.memory_kind = "pinned_host"}, %x: tensor<524288xf32>)
      -> (tensor<524288xf32> {mhlo.memory_kind = "pinned_host"}, tensor<524288xf32>) {
    %0:2 = sdy.manual_computation(%h, %x)
        in_shardings=[<@mesh, [{"x"}]>, <@mesh, [{"x"}]>] out_shardings=[<@mesh, [{"x"}]>, <@mesh, [{"x"}]>]
        manual_axes={"x"} (%a: tensor<262144xf32>, %b: tensor<262144xf32>) {
      %1 = stablehlo.add %b, %b : tensor<262144xf32>
      sdy.return %a, %1 : tensor<262144xf32>, tensor<262144xf32>
    } : (tensor<524288xf32>, tensor<524288xf32>) -> (tensor<524288xf32>, tensor<524288xf32>)
    return %0#0, %0#1 : tensor<524288xf32>, tensor<524288xf32>
  }
}
